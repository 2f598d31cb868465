from django.db import migrations, models

import echomq_app.models.fields
from echomq_app.models import sql


class Migration(migrations.Migration):

    dependencies = [
        ('echomq', '0002_sql_objects'),
    ]

    operations = [
        migrations.CreateModel(
            name='Queue',
            fields=[
                ('name', echomq_app.models.fields.NameField(max_length=70, primary_key=True, serialize=False)),
                ('paused_at', models.DateTimeField(blank=True, null=True)),
                ('pause_reason', models.TextField(blank=True, default='')),
            ],
            options={
                'verbose_name': 'queue',
                'verbose_name_plural': 'queues',
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='Schedule',
            fields=[
                ('name', echomq_app.models.fields.NameField(max_length=100, primary_key=True, serialize=False)),
                ('task_path', models.CharField(max_length=500)),
                ('cron', models.CharField(max_length=200)),
                ('timezone', models.CharField(max_length=64)),
                ('next_at', models.DateTimeField(blank=True, help_text='The next tick, if any.', null=True)),
                ('last_at', models.DateTimeField(blank=True, help_text='The last tick that was looked at.', null=True)),
                ('last_job_id', echomq_app.models.fields.BrandedIdField(blank=True, brand='JOB', null=True)),
                ('last_error', models.TextField(blank=True, default='')),
                ('claimed_at', models.DateTimeField(blank=True, help_text='When a worker last had it in its settings.', null=True)),
                ('claimed_until', models.DateTimeField(blank=True, help_text='After this, no worker has it in its settings.', null=True)),
                ('superseded', models.JSONField(blank=True, default=list, help_text='Earlier definitions: [task, cron, time zone].')),
            ],
            options={
                'verbose_name': 'schedule',
                'verbose_name_plural': 'schedules',
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='MaintenanceTurn',
            fields=[
                ('name', echomq_app.models.fields.NameField(max_length=40, primary_key=True, serialize=False)),
                ('due_at', models.DateTimeField()),
                ('place', models.TextField(blank=True, default='')),
            ],
            options={
                'verbose_name': 'maintenance turn',
                'verbose_name_plural': 'maintenance turns',
            },
        ),
        migrations.CreateModel(
            name='UniqueWindow',
            fields=[
                ('key', echomq_app.models.fields.NameField(max_length=255, primary_key=True, serialize=False)),
                ('job_id', echomq_app.models.fields.BrandedIdField(brand='JOB')),
                ('until', models.DateTimeField(db_index=True)),
            ],
            options={
                'verbose_name': 'unique window',
                'verbose_name_plural': 'unique windows',
            },
        ),
        migrations.RemoveIndex(
            model_name='job',
            name='echomq_job_ready',
        ),
        migrations.AddField(
            model_name='job',
            name='cancel_kind',
            field=models.CharField(blank=True, db_default='', default='', max_length=40),
        ),
        migrations.AddField(
            model_name='job',
            name='group_key',
            field=echomq_app.models.fields.NameField(blank=True, db_default='', default='', help_text='Jobs of a group share a limit of how many run at once.', max_length=510),
        ),
        migrations.AddField(
            model_name='job',
            name='group_limit',
            field=models.IntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='job',
            name='parked',
            field=models.BooleanField(db_default=False, default=False, help_text='Ready, but its group is full: no claim looks at it until there is room.'),
        ),
        migrations.AddField(
            model_name='job',
            name='retention',
            field=models.FloatField(blank=True, help_text='Seconds that the row stays when the job has ended.', null=True),
        ),
        migrations.AddField(
            model_name='job',
            name='unique_key',
            field=echomq_app.models.fields.NameField(blank=True, db_default='', default='', help_text='While a job of this key waits or runs, there is no second one.', max_length=255),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('parked', False), ('state', 'ready')), fields=['queue', '-priority', 'run_after', 'id'], name='echomq_job_ready'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('state', 'ready'), models.Q(('group_key', ''), _negated=True)), fields=['queue', 'parked', 'group_key', '-priority', 'run_after', 'id'], name='echomq_job_group_ready'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('state', 'running'), models.Q(('group_key', ''), _negated=True)), fields=['group_key'], name='echomq_job_group_running'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('finished_at__isnull', False), ('retention__isnull', False)), fields=['retention', 'finished_at'], name='echomq_job_retention'),
        ),
        migrations.AddConstraint(
            model_name='job',
            constraint=models.UniqueConstraint(condition=models.Q(models.Q(('unique_key', ''), _negated=True), ('state__in', ('ready', 'scheduled', 'running'))), fields=('unique_key',), name='echomq_job_unique'),
        ),
        migrations.RunPython(
            sql.migrate_forwards, migrations.RunPython.noop, hints={"model_name": "record"}
        ),
    ]
